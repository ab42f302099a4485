"""Programs that measure the library, the study of its methods, and their results."""
