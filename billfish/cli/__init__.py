"""The command line. `app` puts the groups of commands together."""
