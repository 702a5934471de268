"""What the program tells of itself."""
