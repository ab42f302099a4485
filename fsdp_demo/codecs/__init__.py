"""Pure mathematics of compression: transform, selection, codes and the byte layout of a payload. No communication here."""
