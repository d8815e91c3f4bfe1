"""What a user reads: the report of a program, as text, JSON and drawings."""
