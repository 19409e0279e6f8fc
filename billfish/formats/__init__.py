"""What the bits mean. Imports torch only."""
