"""Pictures of what the engine did: trees, timelines, heatmaps and the report page, as HTML, SVG and terminal text."""
