"""The sections of the configuration: settings with bounds and descriptions, and the checks that concern them."""
