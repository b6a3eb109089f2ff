"""Every private name of another library that the course needs, one file a library (README.md)."""
