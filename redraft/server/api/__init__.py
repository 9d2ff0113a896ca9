"""Wire formats, one file each: routes, request bodies translated to CompletionParams, events translated to responses."""
