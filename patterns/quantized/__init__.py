"""Products of matrices that are stored in few bits."""
