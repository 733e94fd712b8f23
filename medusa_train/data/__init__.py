"""Chat data sets: reading, tokenization, caching and batching.

A record becomes a batch in these steps. docs/development/architecture.md follows one record.

    file, or data set of the hub   sources.open_source      `DatasetConfig` -> `LocalFiles`,
                                                            `HubSplit`
    records                        record_files.read_file   -> `RawRecord`: dict and `file:line`
    messages                       records.normalize        dict -> `Conversation` of `Message`s
      tool calls and results       tool_calls               any form -> `Message.parts`
    prompt and answer, as text     render_answer            messages -> `RenderedAnswer`
      a form for the template      tool_forms               ids, arguments, roles of tool chats
    tokens and loss mask           ChatEncoder.encode       -> `Row(ids, supervised)`
    rows that fit                  examples.encode_examples -> `Example`s, counted in `DataReport`
    all of the data sets           encode_datasets          -> `EncodedDataset`, cached
    training and validation        dataset.load_datasets    `Example`s -> two `EncodedDataset`s
    batches                        dataset.BatchLoader      -> `Batch`: tokens, labels, positions,
                                                            segments

A chat is one row (`Row`, `Example`) as long as each prompt begins with the tokens of the prompt and
answer before it; otherwise it becomes several. A row of a `Batch` holds one such row of a chat, or
several of them if they are packed; there each of them is called a document.
"""
