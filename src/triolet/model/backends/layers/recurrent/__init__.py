"""Recurrent layers over the paged cache: Mamba, gated delta nets, lightning attention and short convolutions."""
