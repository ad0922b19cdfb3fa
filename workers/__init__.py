"""One model replica: an engine and the role it plays. Knows neither HTTP nor Ray nor pools."""
