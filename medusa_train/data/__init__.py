"""Chat data sets: reading, tokenization, caching and batching.

A record becomes a batch in these steps:

    a file or a data set of the hub    sources.open_source      `DatasetConfig` -> `LocalFiles`, `HubSplit`
    records                            record_files.read_file   -> `RawRecord`: a dict and its `file:line`
    messages                           records.normalize        dict -> `Conversation` of `Message`s
    tool calls and results             tool_calls               any form -> `Message.parts`
    a form for the template            tool_forms               ids, arguments and roles of tool chats
    text                               chat_template            messages -> prompts and answers as generated
    tokens and loss mask               tokenize.ChatEncoder     `Conversation` -> `Row(ids, supervised)`
    rows that fit                      examples.encode_examples `Conversation` -> `Example`s, counted in `DataReport`
    training and validation            dataset.load_datasets    `Example`s -> two `EncodedDataset`s
    batches                            dataset.BatchLoader      -> `Batch`: tokens, labels, positions, segments
"""
