"""What leaves the project for other programs."""
