"""Where weights come from: names, folders, GGUF files, the hub and models in memory, each read into a decoder."""
