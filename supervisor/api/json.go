package api

import (
	"errors"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// strictJSON is connect's JSON but for fields that no message has: what was
// asked for is never left out in silence.
type strictJSON string // its name

func (c strictJSON) Name() string { return string(c) }

func (strictJSON) Marshal(message any) ([]byte, error) {
	return protojson.Marshal(message.(proto.Message))
}

func (strictJSON) Unmarshal(text []byte, message any) error {
	if len(text) == 0 {
		return errors.New("it is empty; the smallest request is {}")
	}
	return protojson.Unmarshal(text, message.(proto.Message))
}
