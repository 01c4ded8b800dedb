package api

import (
	"errors"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// strictJSON is connect's JSON but for two things. A field that no message has
// is an error: what was asked for is never left out in silence. And fields are
// written with the names that they have everywhere else, in vz.json, in status
// and in the streams, with zeros too; read is either spelling.
type strictJSON string // its name

func (c strictJSON) Name() string { return string(c) }

func (strictJSON) Marshal(message any) ([]byte, error) {
	return protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(message.(proto.Message))
}

func (strictJSON) Unmarshal(text []byte, message any) error {
	if len(text) == 0 {
		return errors.New("it is empty; the smallest request is {}")
	}
	return protojson.Unmarshal(text, message.(proto.Message))
}
