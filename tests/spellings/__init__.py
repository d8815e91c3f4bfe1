"""Ways to write the operations, as plain data for every test of the matcher."""
