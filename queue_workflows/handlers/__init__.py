"""Call the handlers of claimed jobs and turn what they do into outcomes; no database."""
