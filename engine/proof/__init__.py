"""The doctor, its certificates, fingerprints and traces."""
