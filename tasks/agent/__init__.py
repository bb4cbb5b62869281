"""What runs on a host: standard library only, Python 3.8 or newer, sent over stdin by the link."""
