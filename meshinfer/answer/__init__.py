"""One answer's life: sampling, text, template, session; pure."""
