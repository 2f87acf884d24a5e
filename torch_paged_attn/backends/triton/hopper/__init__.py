"""The kernels for Hopper, in Gluon: warp-specialised, fed by the tensor memory accelerator."""
