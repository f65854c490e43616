"""One backend's way to emit each operation, a file each."""
