"""What a few need: nothing else imports these parts, and everything else works without this folder."""
