"""What does the C library's heap cost a step, in memory and in time?"""
