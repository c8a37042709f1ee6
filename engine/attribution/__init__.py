"""Effects of patches, estimated by gradients and measured."""
