"""Layers of the native decoder: products, latent attention, mixtures of experts, and the warm-up of their kernels."""
