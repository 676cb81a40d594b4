"""Object files to loadable images, without a system linker."""
