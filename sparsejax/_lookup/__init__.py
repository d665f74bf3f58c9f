"""Operations that read a table by rows: lookup, embedding_bag, dot."""
