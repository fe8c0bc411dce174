DROP FUNCTION IF EXISTS queue_workflows_put_sample(text, integer, jsonb, boolean);
DROP TABLE IF EXISTS hw_samples;
DROP TABLE IF EXISTS model_controls;
DROP FUNCTION IF EXISTS queue_workflows_number_model_request();
DROP SEQUENCE IF EXISTS model_controls_request_seq;
