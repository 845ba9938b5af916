"""One file an operation: a torch reference, which is what runs on CPU, and kernels of the same signature."""
