"""Model folders: from a hub id or path to configuration and tensors."""
