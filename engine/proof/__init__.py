"""The doctor and its certificates, fingerprints and traces."""
