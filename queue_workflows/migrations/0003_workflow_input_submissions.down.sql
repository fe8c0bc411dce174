DROP TABLE IF EXISTS workflow_input_submissions;
