"""Layer norm and RMS norm, and the kernels over rows that both share."""
