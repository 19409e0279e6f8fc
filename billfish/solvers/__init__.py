"""How codes are chosen. Offline: nothing that serves a token imports this room."""
