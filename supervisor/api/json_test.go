package api

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"vz.test/vz/supervisor/api/vzv1"
)

type faultStarter struct {
	Backend
	path string
}

func (b *faultStarter) StartFault(_ context.Context, r *vzv1.StartFaultRequest) (*vzv1.Fault, error) {
	b.path = r.GetSpec().GetPath()
	return &vzv1.Fault{Name: r.GetName()}, nil
}

func TestJSONWithUnknownFieldIsRefused(t *testing.T) {
	for _, test := range []struct {
		contentType, body string
		status            int
		says              string
	}{
		{"application/json", `{"name":"slow","spec":{"path":"web-db"}}`, http.StatusOK, `"slow"`},
		{"application/json; charset=utf-8", `{"name":"slow","spec":{"path":"web-db"}}`, http.StatusOK, `"slow"`},
		{"application/json", `{"name":"slow","spec":{"path":"web-db","directon":"request"}}`, http.StatusBadRequest, "directon"},
		{"application/json; charset=utf-8", `{"name":"slow","path":"web-db"}`, http.StatusBadRequest, `\"path\"`},
		{"application/json", ``, http.StatusBadRequest, "{}"},
	} {
		backend := &faultStarter{}
		recorder := httptest.NewRecorder()
		request := httptest.NewRequest(http.MethodPost, "/vz.v1.FaultService/Start", strings.NewReader(test.body))
		request.Header.Set("Content-Type", test.contentType)
		Handler(backend).ServeHTTP(recorder, request)
		answer, _ := io.ReadAll(recorder.Body)
		if recorder.Code != test.status || !strings.Contains(string(answer), test.says) {
			t.Errorf("%s %s: %d %s", test.contentType, test.body, recorder.Code, answer)
		}
		if test.status != http.StatusOK && backend.path != "" {
			t.Errorf("%s reached the backend", test.body)
		}
	}
}
