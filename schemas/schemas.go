// Package schemas holds what vz's documents and messages look like: the JSON
// Schema of vz.json, embedded here, and the .proto files of the API and of the
// agent's channel, whose generated code stands beside its users.
//
// The schema is for reading and for editors as much as for package config,
// which validates with it. This package knows neither Go types nor rules; it
// imports nothing of vz.
package schemas

import _ "embed"

//go:generate go run -C .. ./schemas/generate

// ProjectDefinitionV1ID is the $id of ProjectDefinitionV1.
const ProjectDefinitionV1ID = "https://vz.test/schemas/vz-project-definition-v1.schema.json"

// ProjectDefinitionV1 is the JSON Schema (2020-12) of vz.json, version 1.
//
//go:embed vz-project-definition-v1.schema.json
var ProjectDefinitionV1 []byte
