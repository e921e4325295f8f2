"""Who is who: identity, roster, tokens; pure."""
