"""JSON schemas of the `spec` of the two custom resources, with only the fields that our manifests use.

Written from the documentation and types of KEDA 2.12 and JobSet 0.8, because their own schemas are in no package: they catch a
misspelt field and a wrong type, not a rule that the operators check themselves.
"""

SCALED_OBJECT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["scaleTargetRef", "triggers"],
    "properties": {
        "scaleTargetRef": {"type": "object", "required": ["name"]},
        "minReplicaCount": {"type": "integer", "minimum": 0},
        "maxReplicaCount": {"type": "integer", "minimum": 1},
        "pollingInterval": {"type": "integer", "minimum": 1},
        "advanced": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "scalingModifiers": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["formula", "target"],
                    "properties": {
                        "formula": {"type": "string"},
                        "target": {"type": "string"},
                        "metricType": {"enum": ["AverageValue", "Value"]},
                    },
                },
                "horizontalPodAutoscalerConfig": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"behavior": {"type": "object"}},
                },
            },
        },
        "triggers": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["type", "name", "metadata"],
                "properties": {
                    "type": {"const": "metrics-api"},
                    "name": {"type": "string", "pattern": "^[a-z_]+$"},
                    "metadata": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["url", "valueLocation", "targetValue"],
                        "properties": {key: {"type": "string"} for key in ("url", "valueLocation", "targetValue")},
                    },
                },
            },
        },
    },
}
JOB_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["replicatedJobs"],
    "properties": {
        "network": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"enableDNSHostnames": {"type": "boolean"}, "subdomain": {"type": "string"}},
        },
        "failurePolicy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "maxRestarts": {"type": "integer"},
                "restartStrategy": {"enum": ["Recreate", "BlockingRecreate"]},
                "rules": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "action"],
                        "properties": {
                            "name": {"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                            "action": {"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
                            "onJobFailureReasons": {"type": "array", "items": {"const": "PodFailurePolicy"}},
                        },
                    },
                },
            },
        },
        "replicatedJobs": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "template"],
                "properties": {"name": {"type": "string"}, "template": {"type": "object"}},
            },
        },
    },
}
