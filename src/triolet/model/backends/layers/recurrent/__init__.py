"""Recurrent layers over the paged cache: Mamba-2, gated delta nets and short convolutions."""
