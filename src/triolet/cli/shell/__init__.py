"""Shell completion and the manual page, made from the commands themselves."""
