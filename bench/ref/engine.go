package main

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

// answer is what the fake engine says to every small chat request.
const answer = `{"id":"chatcmpl-0","object":"chat.completion","created":0,"model":"bench",` +
	`"choices":[{"index":0,"message":{"role":"assistant","content":"A short answer of a few words."},` +
	`"finish_reason":"stop"}],"usage":{"prompt_tokens":96,"completion_tokens":8,"total_tokens":104}}`

// probes are the paths a gate looks at to learn how an engine is; each answers the smallest thing that is true.
var probes = map[string]string{
	"/health":       `{"status":"ok"}`,
	"/api/version":  `{"version":"0.12.0"}`,
	"/api/ps":       `{"models":[]}`,
	"/api/tags":     `{"models":[{"name":"bench:latest","model":"bench:latest","size":1,"digest":"0","details":{}}]}`,
	"/api/generate": `{"model":"bench","created_at":"2026-01-01T00:00:00Z","response":"","done":true,"done_reason":"unload"}`,
	"/system_stats": `{"system":{"os":"posix"},"devices":[]}`,
	"/queue":        `{"queue_running":[],"queue_pending":[]}`,
}

// engine serves chat: small JSON, or with ?n=N&us=U a stream of N chunks, one every U µs on an even clock, each
// carrying its number and the time it was sent (ns).
func engine(addr string) error {
	mux := http.NewServeMux()
	for path, body := range probes {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) { say(w, r, body) })
	}
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		chunks, _ := strconv.Atoi(query.Get("n"))
		every, _ := strconv.Atoi(query.Get("us"))
		if chunks == 0 {
			say(w, r, answer)
			return
		}
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		flush := w.(http.Flusher).Flush
		begin := time.Now()
		for i := 0; i < chunks; i++ {
			time.Sleep(time.Until(begin.Add(time.Duration(i*every) * time.Microsecond)))
			_, err := fmt.Fprintf(w, `data: {"id":"chatcmpl-0","object":"chat.completion.chunk","n":%d,"ns":%d,`+
				`"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}`+"\n\n", i, time.Now().UnixNano())
			if err != nil {
				return
			}
			flush()
		}
		io.WriteString(w, "data: [DONE]\n\n")
	})
	return http.ListenAndServe(addr, mux)
}

func say(w http.ResponseWriter, r *http.Request, body string) {
	io.Copy(io.Discard, r.Body)
	w.Header().Set("Content-Type", "application/json")
	io.WriteString(w, body)
}
