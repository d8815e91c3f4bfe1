"""Layer norm and RMS norm: kernels of rows that both share."""
