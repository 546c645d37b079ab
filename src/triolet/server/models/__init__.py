"""Several models in one server: engines that are opened and closed on demand."""
