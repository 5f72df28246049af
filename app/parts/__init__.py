"""What the pages share: cached queries (data), controls that the URL restores (controls), messages and downloads (view)."""
