"""The pages of the dashboard in Debian's Chromium, driven by Playwright (extra: dev)."""
