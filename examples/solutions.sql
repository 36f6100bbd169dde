-- Each line of the log holds a question and the answers of four models: four rows, one policy each.
SELECT
    question AS prompt,
    answer.solution AS response,
    answer.is_correct::INT AS reward,
    policy,
    ground_truth
FROM (
    UNPIVOT source
    ON "6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"
    INTO NAME policy VALUE answer
)
