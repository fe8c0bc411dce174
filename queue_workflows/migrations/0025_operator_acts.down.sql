DROP TABLE operator_acts;
