-- Four policies answered each of the 1319 test questions of GSM8K, one question a line:
--   {"question": ..., "ground_truth": ..., "6b_finetuning": {"is_correct": ..., "solution": ...}, "6b_verification": ...}
-- This turns each line into four responses; the policy is the name of the key.
--   rec collect example_model_solutions.jsonl --into DATASET --select docs/gsm8k.sql
WITH answers AS (
    UNPIVOT source
    ON "6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"
    INTO NAME policy VALUE answer
)
SELECT
    question AS prompt,
    answer.solution AS response,
    answer.is_correct::INT AS reward,
    policy,
    ground_truth,
    source_row
FROM answers
