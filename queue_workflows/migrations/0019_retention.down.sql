DROP TABLE IF EXISTS queue_settings;
