"""Photos and videos to scenes with poses."""
