"""One file per operation: launcher, torch reference, Triton kernel; C++ ones in kernels/cpu."""
