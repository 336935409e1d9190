"""What did a run do, from what it has written? A page and a picture of it, for people."""
